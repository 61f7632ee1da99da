"""The lexicon: nouns, verbs, names, adjectives, places and times in all languages.

A table is text with a concept per line and columns separated by white space, which shows the languages side
by side. ``_`` stands for a space within a column, ``-`` for nothing.
"""

from collections import namedtuple
from typing import Any


def read(columns: str, table: str) -> dict[str, Any]:
    """The rows of a table, as named tuples, by their first column; a malformed row is a ValueError."""
    Row = namedtuple("Row", columns.split())
    rows = {}
    for line in filter(str.strip, table.splitlines()):
        cells = [None if c == "-" else c.replace("_", " ") for c in line.split()]
        if len(cells) != len(Row._fields) or cells[0] in rows:
            raise ValueError(f"not a new row of {len(Row._fields)} columns: {line}")
        rows[cells[0]] = Row(*cells)
    return rows


# Nouns. Those without a plural are not counted; Northern Sotho words have noun classes, Malay words a
# classifier.

_PEOPLE_AND_ANIMALS = """
teacher teachers    morutiši barutiši 1 2   guru orang      guro       mestre mestres m     person
child children      ngwana bana 1 2         budak orang     bata       nen nens m           person
man men             monna banna 1 2         lelaki orang    lalaki     home homes m         person
woman women         mosadi basadi 1 2       perempuan orang babae      dona dones f         person
student students    moithuti baithuti 1 2   pelajar orang   estudyante alumne alumnes m     person
friend friends      mogwera bagwera 1 2     kawan orang     kaibigan   amic amics m         person
doctor doctors      ngaka dingaka 9 10      doktor orang    doktor     metge metges m       person
farmer farmers      molemi balemi 1 2       petani orang    magsasaka  pagès pagesos m      person
worker workers      mošomi bašomi 1 2       pekerja orang   manggagawa obrer obrers m       person
guest guests        moeng baeng 1 2         tetamu orang    bisita     convidat convidats m person
policeman policemen lephodisa maphodisa 5 6 polis orang     pulis      policia policies m   person
king kings          kgoši dikgoši 9 10      raja orang      hari       rei reis m           person
dog dogs            mpša dimpša 9 10        anjing ekor     aso        gos gossos m         animal
cat cats            katse dikatse 9 10      kucing ekor     pusa       gat gats m           animal
cow cows            kgomo dikgomo 9 10      lembu ekor      baka       vaca vaques f        animal
goat goats          pudi dipudi 9 10        kambing ekor    kambing    cabra cabres f       animal
horse horses        pere dipere 9 10        kuda ekor       kabayo     cavall cavalls m     animal
chicken chickens    kgogo dikgogo 9 10      ayam ekor       manok      gallina gallines f   animal
bird birds          nonyana dinonyana 9 10  burung ekor     ibon       ocell ocells m       animal
pig pigs            kolobe dikolobe 9 10    babi ekor       baboy      porc porcs m         animal
elephant elephants  tlou ditlou 9 10        gajah ekor      elepante   elefant elefants m   animal
"""

_FOOD = """
bread -        borotho - 14 -       roti -      tinapay  pa - m           food
meat -         nama - 9 -           daging -    karne    carn - f         food
cheese -       tšhese - 9 -         keju -      keso     formatge - m     food
fish -         hlapi - 9 -          ikan -      isda     peix - m         food
egg eggs       lee mae 5 6          telur biji  itlog    ou ous m         food
apple apples   apola diapola 9 10   epal biji   mansanas poma pomes f     food,fruit
banana bananas panana dipanana 9 10 pisang biji saging   plàtan plàtans m food,fruit
water -        meetse - 6 -         air -       tubig    aigua - f        drink
milk -         maswi - 6 -          susu -      gatas    llet - f         drink
tea -          teye - 9 -           teh -       tsaa     te - m           drink
"""

_THINGS = """
book books       puku dipuku 9 10          buku buah     libro    llibre llibres m     thing,text
letter letters   lengwalo mangwalo 5 6     surat pucuk   liham    carta cartes f       thing,text
chair chairs     setulo ditulo 7 8         kerusi buah   silya    cadira cadires f     thing,solid
table tables     tafola ditafola 9 10      meja buah     mesa     taula taules f       thing,solid
car cars         koloi dikoloi 9 10        kereta buah   kotse    cotxe cotxes m       thing,solid
house houses     ntlo dintlo 9 10          rumah buah    bahay    casa cases f         building
door doors       lebati mabati 5 6         pintu buah    pinto    porta portes f       opening
window windows   lefasetere mafasetere 5 6 tingkap buah  bintana  finestra finestres f opening
box boxes        lepokisi mapokisi 5 6     kotak buah    kahon    caixa caixes f       thing,opening
bag bags         mokotla mekotla 3 4       beg buah      bag      bossa bosses f       thing,opening
hat hats         kefa dikefa 9 10          topi buah     sumbrero barret barrets m     thing
shirt shirts     hempe dihempe 9 10        baju helai    kamisa   camisa camises f     thing
cup cups         komiki dikomiki 9 10      cawan buah    tasa     tassa tasses f       thing,fragile
spoon spoons     lehwana mahwana 5 6       sudu batang   kutsara  cullera culleres f   thing
knife knives     thipa dithipa 9 10        pisau bilah   kutsilyo ganivet ganivets m   thing
key keys         senotlelo dinotlelo 7 8   kunci batang  susi     clau claus f         thing
picture pictures seswantšho diswantšho 7 8 gambar keping larawan  quadre quadres m     thing
tree trees       mohlare mehlare 3 4       pokok batang  puno     arbre arbres m       plant
flower flowers   letšoba matšoba 5 6       bunga kuntum  bulaklak flor flors f         plant
"""

NOUNS = read(
    "english english_plural sotho sotho_plural sotho_class sotho_plural_class malay classifier tagalog "
    "catalan catalan_plural gender kinds",
    _PEOPLE_AND_ANIMALS + _FOOD + _THINGS,
)

# Verbs. Subjects and objects are kinds of nouns (``*``: all); verbs without objects are intransitive. The
# Catalan present tense has first, second and third person singular, first and third person plural.
#
# Tagalog forms focus on the object where there is one, because a definite object has to be the topic
# of its sentence, and on the actor otherwise.

_WITH_OBJECT = """
read read reading  bala badile  membaca  person text \
    binasa binabasa babasahin basahin \
    llegir llegeixo,llegeixes,llegeix,llegim,llegeixen
write wrote writing  ngwala ngwadile  menulis  person text \
    isinulat isinusulat isusulat isulat \
    escriure escric,escrius,escriu,escrivim,escriuen
buy bought buying  reka rekile  membeli  person thing,food,drink,animal \
    binili binibili bibilhin bilhin \
    comprar compro,compres,compra,comprem,compren
sell sold selling  rekiša rekišitše  menjual  person thing,food,drink,animal \
    ibinenta ibinebenta ibebenta ibenta \
    vendre venc,vens,ven,venem,venen
carry carried carrying  rwala rwele  membawa  person thing,food,drink \
    binuhat binubuhat bubuhatin buhatin \
    portar porto,portes,porta,portem,porten
eat ate eating  ja jele  makan  person,animal food \
    kinain kinakain kakainin kainin \
    menjar menjo,menges,menja,mengem,mengen
drink drank drinking  nwa nwele  minum  person,animal drink \
    ininom iniinom iinumin inumin \
    beure bec,beus,beu,bevem,beuen
cook cooked cooking  apea apeile  memasak  person food \
    niluto niluluto lulutuin lutuin \
    cuinar cuino,cuines,cuina,cuinem,cuinen
look_at looked_at looking_at  lebelela lebeletše  melihat  person,animal * \
    tiningnan tinitingnan titingnan tingnan \
    mirar miro,mires,mira,mirem,miren
clean cleaned cleaning  hlwekiša hlwekišitše  membersihkan  person thing,opening,building \
    nilinis nililinis lilinisin linisin \
    netejar netejo,neteges,neteja,netegem,netegen
open opened opening  bula butše  membuka  person opening \
    binuksan binubuksan bubuksan buksan \
    obrir obro,obres,obre,obrim,obren
close closed closing  tswalela tswaletše  menutup  person opening \
    isinara isinasara isasara isara \
    tancar tanco,tanques,tanca,tanquem,tanquen
hide hid hiding  fihla fihlile  menyembunyikan  person thing,food \
    itinago itinatago itatago itago \
    amagar amago,amagues,amaga,amaguem,amaguen
break broke breaking  pšhatla pšhatlile  memecahkan  person fragile \
    binasag binabasag babasagin basagin \
    trencar trenco,trenques,trenca,trenquem,trenquen
build built building  aga agile  membina  person building \
    itinayo itinatayo itatayo itayo \
    construir construeixo,construeixes,construeix,construïm,construeixen
draw drew drawing  thala thadile  melukis  person person,animal,thing,building,plant \
    iginuhit iginuguhit iguguhit iguhit \
    dibuixar dibuixo,dibuixes,dibuixa,dibuixem,dibuixen
paint painted painting  penta pentile  mengecat  person solid,opening,building \
    pininturahan pinipinturahan pipinturahan pinturahan \
    pintar pinto,pintes,pinta,pintem,pinten
repair repaired repairing  lokiša lokišitše  membaiki  person solid,opening,building \
    inayos inaayos aayusin ayusin \
    reparar reparo,repares,repara,reparem,reparen
call called calling  bitša biditše  memanggil  person person,animal \
    tinawag tinatawag tatawagin tawagin \
    cridar crido,crides,crida,cridem,criden
help helped helping  thuša thušitše  membantu  person person,animal \
    tinulungan tinutulungan tutulungan tulungan \
    ajudar ajudo,ajudes,ajuda,ajudem,ajuden
visit visited visiting  etela etetše  melawat  person person \
    binisita binibisita bibisitahin bisitahin \
    visitar visito,visites,visita,visitem,visiten
wait_for waited_for waiting_for  emela emetše  menunggu  person,animal person \
    hinintay hinihintay hihintayin hintayin \
    esperar espero,esperes,espera,esperem,esperen
greet greeted greeting  dumediša dumedišitše  menyapa  person person \
    binati binabati babatiin batiin \
    saludar saludo,saludes,saluda,saludem,saluden
follow followed following  latela latetše  mengikuti  person,animal person,animal \
    sinundan sinusundan susundan sundan \
    seguir segueixo,segueixes,segueix,seguim,segueixen
feed fed feeding  fepa fepile  memberi_makan  person animal \
    pinakain pinapakain papakainin pakainin \
    alimentar alimento,alimentes,alimenta,alimentem,alimenten
"""

_WITHOUT_OBJECT = """
sleep slept sleeping  robala robetše  tidur  person,animal - \
    natulog natutulog matutulog matulog \
    dormir dormo,dorms,dorm,dormim,dormen
work worked working  šoma šomile  bekerja  person - \
    nagtrabaho nagtatrabaho magtatrabaho magtrabaho \
    treballar treballo,treballes,treballa,treballem,treballen
dance danced dancing  bina binne  menari  person - \
    sumayaw sumasayaw sasayaw sumayaw \
    ballar ballo,balles,balla,ballem,ballen
sing sang singing  opela opetše  menyanyi  person - \
    kumanta kumakanta kakanta kumanta \
    cantar canto,cantes,canta,cantem,canten
run ran running  kitima kitimile  berlari  person,animal - \
    tumakbo tumatakbo tatakbo tumakbo \
    córrer corro,corres,corre,correm,corren
walk walked walking  sepela sepetše  berjalan  person,animal - \
    naglakad naglalakad maglalakad maglakad \
    caminar camino,camines,camina,caminem,caminen
cry cried crying  lla llile  menangis  person - \
    umiyak umiiyak iiyak umiyak \
    plorar ploro,plores,plora,plorem,ploren
laugh laughed laughing  sega segile  ketawa  person - \
    tumawa tumatawa tatawa tumawa \
    riure ric,rius,riu,riem,riuen
play played playing  raloka ralokile  bermain  person,animal - \
    naglaro naglalaro maglalaro maglaro \
    jugar jugo,jugues,juga,juguem,juguen
rest rested resting  khutša khuditše  berehat  person,animal - \
    nagpahinga nagpapahinga magpapahinga magpahinga \
    descansar descanso,descanses,descansa,descansem,descansen
swim swam swimming  rutha ruthile  berenang  person - \
    lumangoy lumalangoy lalangoy lumangoy \
    nedar nedo,nedes,neda,nedem,neden
speak spoke speaking  bolela boletše  bercakap  person - \
    nagsalita nagsasalita magsasalita magsalita \
    parlar parlo,parles,parla,parlem,parlen
study studied studying  ithuta ithutile  belajar  person - \
    nag-aral nag-aaral mag-aaral mag-aral \
    estudiar estudio,estudies,estudia,estudiem,estudien
"""

VERBS = read(
    "english english_past english_ing sotho sotho_past malay subjects objects "
    "tagalog_past tagalog_present tagalog_future tagalog_infinitive catalan catalan_present",
    _WITH_OBJECT + _WITHOUT_OBJECT,
)

NAMES = read(
    "english gender",
    """
    Maria f
    Anna f
    Aminah f
    Lerato f
    Thabo m
    Pau m
    Ahmad m
    Ramon m
    """,
)

# Northern Sotho has the stem and its form in class 9 (-: joined by the possessive concord), Catalan
# masculine, feminine and their plurals; kinds are those of the nouns that an adjective goes with.
ADJECTIVES = read(
    "english sotho sotho_nasal malay tagalog catalan kinds",
    """
    big golo kgolo besar malaki gran,gran,grans,grans  animal,thing,building,plant,fruit
    small nnyane nnyane kecil maliit petit,petita,petits,petites  animal,thing,plant,fruit,building
    black so ntsho        hitam  itim      negre,negra,negres,negres  animal,thing
    white šweu tšhweu     putih  puti      blanc,blanca,blancs,blanques  animal,thing,building
    red hubedu khubedu    merah  pula      vermell,vermella,vermells,vermelles  thing,opening,fruit
    green tala tala       hijau  berde     verd,verda,verds,verdes  thing,opening,fruit
    new swa mpsha         baharu bago      nou,nova,nous,noves  thing,building,opening
    old kgale -           lama   luma      vell,vella,vells,velles  thing,building,opening
    expensive go_tura -   mahal  mahal     car,cara,cars,cares  thing
    beautiful botse botse cantik maganda   bonic,bonica,bonics,boniques  thing,building,plant
    tall telele telele    tinggi matangkad alt,alta,alts,altes  person
    short kopana kopana   rendah pandak    baix,baixa,baixos,baixes  person
    strong go_tia -       kuat   malakas   fort,forta,forts,fortes  person,animal
    """,
)

# Preposition, noun and gender (-: no article) are Catalan.
PLACES = read(
    "key english sotho malay tagalog preposition catalan gender",
    """
    home at_home               gae          di_rumah          sa_bahay      a casa -
    school at_school           sekolong     di_sekolah        sa_paaralan   a escola f
    market at_the_market       mmarakeng    di_pasar          sa_palengke   a mercat m
    church at_church           kerekeng     di_gereja         sa_simbahan   a església f
    garden in_the_garden       serapaneng   di_taman          sa_hardin     a jardí m
    kitchen in_the_kitchen     ka_khitšhing di_dapur          sa_kusina     a cuina f
    town in_town               toropong     di_bandar         sa_bayan      a ciutat f
    hospital at_the_hospital   sepetlele    di_hospital       sa_ospital    a hospital m
    river near_the_river       kgauswi_le_noka berhampiran_sungai malapit_sa_ilog a_prop_de riu m
    tree under_the_tree        ka_tlase_ga_mohlare di_bawah_pokok sa_ilalim_ng_puno sota arbre m
    """,
)

TIMES = read(
    "english sotho malay tagalog catalan tense",
    """
    now        bjale            sekarang    ngayon                  ara                  present
    yesterday  maabane          semalam     kahapon                 ahir                 past
    last_week  beke_ye_e_fetilego minggu_lepas noong_nakaraang_linggo la_setmana_passada past
    last_year  ngwaga_wo_o_fetilego tahun_lepas noong_nakaraang_taon l'any_passat        past
    tomorrow   gosasa           esok        bukas                   demà                 future
    next_week  beke_ye_e_tlago  minggu_depan sa_susunod_na_linggo   la_setmana_que_ve    future
    next_year  ngwaga_wo_o_tlago tahun_depan sa_susunod_na_taon     l'any_que_ve         future
    """,
)
